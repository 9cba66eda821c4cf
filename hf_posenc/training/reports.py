"""Where a run tells how it goes, through `--report-to`: refused before anything is done if it cannot."""

from __future__ import annotations

from typing import Any

from transformers.integrations import get_reporting_integration_callbacks

PACKAGES = {"clearml": "clearml", "comet_ml": "comet_ml", "mlflow": "mlflow", "tensorboard": "tensorboard"}
PACKAGES |= {"trackio": "trackio", "wandb": "wandb"}


def refuse_reports(arguments: Any) -> None:
    """Raise ValueError for what is not known to transformers, or not installed."""
    names = arguments.report_to if isinstance(arguments.report_to, list) else [arguments.report_to]
    for name in names:
        if name in (None, "none"):
            continue
        try:
            for callback in get_reporting_integration_callbacks([name]):
                if isinstance(callback, type):
                    callback()
        except (RuntimeError, ImportError, AssertionError) as error:
            package = PACKAGES.get(name, name)
            raise ValueError(
                f"--report-to {name} needs a package that is not here: pip install {package}. {error}"
            ) from None
