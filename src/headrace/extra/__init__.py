"""Mixers and stages of mixers that few need, each a file that registers itself as a plug-in does: its spec, its layer,
its names. A file is imported when one of its names, or a spec that has its stage, is asked for."""
