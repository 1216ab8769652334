from tests.upscalers.conftest import base, command, in_process, refused, shared_base  # noqa: F401 - fixtures
