"""Export variants as stock checkpoints, one module per target architecture."""

from .run import Export, export_checkpoint
from .same_rotation import stock_rope_parameters
from .variant import NoStockEqual

__all__ = ["Export", "NoStockEqual", "export_checkpoint", "stock_rope_parameters"]
