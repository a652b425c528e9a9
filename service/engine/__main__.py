"""Begins and ends an engine process. Owns what has to happen before the first import; the rest is `service.engine.process`."""

import gc
import os

# Imported objects live as long as the process: looking through them for garbage takes a sixth of importing torch.
gc.disable()

# Threads of a launch wait for each other thousands of times a second. By default libgomp has them turn for 8 ms before they
# sleep: where others need the cores, each wait takes that long. A thousand turns are 50 us, enough between the steps of an op.
# libgomp reads it when torch is imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

from tilewire.service.engine.process import main  # noqa: E402

if __name__ == "__main__":
    # The interpreter would take torch apart object by object, for a tenth of a second.
    os._exit(main())
