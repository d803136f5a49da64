"""The CUDA half of the operators: ``.cu`` sources, compiled at run time. Knows torch and CuPy, nothing of Lightning."""
