"""Training: texts, packed rows, and the loop that changes nothing but gates."""
