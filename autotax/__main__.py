"""`python -m autotax ...` is `autotax ...`."""

from autotax.start import main

raise SystemExit(main())
