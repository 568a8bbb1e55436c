"""The ``odc`` command: tools around odcengine."""
