"""In which dtype parameters are stored, inputs and attention operands agree, and the encoder evaluates."""
