"""Begins and ends an engine process. Owns what has to happen before the first import; the rest is `service.engine.process`."""

import gc
import os

# Imported objects live as long as the process: looking through them for garbage takes a sixth of importing torch.
gc.disable()

from tilewire.service.engine.process import main  # noqa: E402

if __name__ == "__main__":
    # The interpreter would take torch apart object by object, for a tenth of a second.
    os._exit(main())
