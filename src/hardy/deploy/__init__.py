"""Networks that leave the federation: predictors, ONNX files, networks for new clients."""

from hardy.deploy.onnx_runtime import OnnxPredictor
from hardy.deploy.predictor import Predictor

__all__ = ["OnnxPredictor", "Predictor"]
