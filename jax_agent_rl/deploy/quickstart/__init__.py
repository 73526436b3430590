"""What a first run needs: the small model, and the command that fetches, prepares and trains."""
