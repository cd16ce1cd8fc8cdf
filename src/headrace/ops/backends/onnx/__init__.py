"""The backend "onnx": while `torch.onnx.export` traces a model, the recurrence becomes one node of the graph."""
