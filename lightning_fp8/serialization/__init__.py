"""Writes FP8 safetensors that vLLM and transformers read, and reads such files."""
