"""What holds for every test: no network, no tracked run that leaves this machine, no terminal of its own."""

from __future__ import annotations

import os

# Before any test module is imported, since libraries read these at import.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
for name in ("FORCE_COLOR", "CLICOLOR_FORCE", "COLUMNS"):
    os.environ.pop(name, None)
