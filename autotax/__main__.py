"""`python -m autotax ...` is `autotax ...`."""

from autotax.cli.start import main

raise SystemExit(main())
