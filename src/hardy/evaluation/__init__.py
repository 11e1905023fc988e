"""What a trained federation is worth: served networks, accuracy under threats, and whether to believe it."""
