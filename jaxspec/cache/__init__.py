"""Where keys and values live: the arrays on the device, the metadata that addresses them, and the host's books of blocks."""
