"""The layer of a MixerSpec, one linear mixer for the whole family, and its parts."""
