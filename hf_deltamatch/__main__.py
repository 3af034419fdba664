"""``python -m hf_deltamatch`` is the ``hf-deltamatch`` command."""

import sys

from hf_deltamatch.cli import main

if __name__ == "__main__":
    sys.exit(main())
