"""GGUF, the model files of llama.cpp and Ollama: their gates found, compared with a delta's base, and patched."""

from remoe_cli.gguf.patch import parts, patch_copy, patch_in_place, Patched, state, undo

__all__ = ["Patched", "parts", "patch_copy", "patch_in_place", "state", "undo"]
