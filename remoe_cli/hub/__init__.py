"""Checkpoints on disk and on the Hugging Face Hub: open, download, upload."""
