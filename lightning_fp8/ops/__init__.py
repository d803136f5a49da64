"""What casts and products of every kind compute with: formats, arithmetic, and kernels. No layer is known here."""
