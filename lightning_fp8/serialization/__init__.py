"""FP8 safetensors, as vLLM and transformers read them, and back."""
