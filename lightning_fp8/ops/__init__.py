"""The basis of all casts and products: formats, arithmetic, and kernels. Nothing here knows of layers."""
