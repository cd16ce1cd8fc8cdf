"""The backends of the recurrence, one folder each; ops/dispatch.py lists them and those in extra/, fla and onnx."""
