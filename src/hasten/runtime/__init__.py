"""Translating without PyTorch: models that `hasten export --to onnx` wrote, in ONNX Runtime.

Nothing here imports PyTorch; numpy, sentencepiece and onnxruntime are all it needs.
"""

from hasten.runtime.translator import RuntimeTranslator, load

__all__ = ["RuntimeTranslator", "load"]
