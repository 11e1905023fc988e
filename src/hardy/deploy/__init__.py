"""Networks that leave the federation: predictors, ONNX files, networks for new clients."""
