"""Records of mixers whose layers are plug-ins."""
