"""The former name of `tests.engines`, which programs from outside import."""

import sys

from tests import engines

sys.modules[__name__] = engines
