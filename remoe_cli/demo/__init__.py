"""The embedded demo: a small DeepSeek-V2-architecture checkpoint that was really trained, and its text.

`PATH` is the checkpoint folder in Hugging Face format; `corpus` holds the documents it was trained on.
"""

from pathlib import Path

PATH = Path(__file__).parent / "checkpoint"
