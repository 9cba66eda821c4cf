"""Evaluate models at different lengths: perplexity, passkey retrieval, order sensitivity, embedding similarity."""

from .report import EvaluationReport
from .results import METRICS, Estimate, OrderResult, PasskeyResult, PerplexityResult, Result, SimilarityResult, Stopped
from .run import evaluate
from .settings import EvaluationSettings

__all__ = ["METRICS", "EvaluationReport", "EvaluationSettings", "evaluate"]
__all__ += ["Estimate", "OrderResult", "PasskeyResult", "PerplexityResult", "Result", "SimilarityResult", "Stopped"]
