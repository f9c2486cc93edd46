"""Measuring a resident model: perplexity and overlap over text, and routing traces of decoding."""
