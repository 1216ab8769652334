"""How a fork of the tests' process ends."""

import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn


def end_with(program: Callable[..., Any], *arguments: Any) -> NoReturn:
    """Run a program in a fork and end the fork with its status, as a fresh interpreter would end."""
    status: Any = 1
    try:
        status = program(*arguments) or 0
    except SystemExit as ended:
        status = ended.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status if isinstance(status, int) else 1)
