"""Begins an engine process. Owns what has to happen before the first import; the process itself is `service.engine.process`."""

import gc
import sys

# Imported objects live as long as the process: looking through them for garbage takes a sixth of importing torch.
gc.disable()

from tilewire.service.engine.process import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
