"""What travels: the whole image of a version, or what changed in it."""
