"""``python -m foredraft``, the same as ``foredraft``.

Owns: nothing.  Does not know: any command.
"""

from __future__ import annotations

import sys

from foredraft.cli import main

if __name__ == "__main__":
    sys.exit(main())
