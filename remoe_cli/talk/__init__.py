"""What generate and chat share: text as it comes, its line of figures, the turns of a conversation."""
