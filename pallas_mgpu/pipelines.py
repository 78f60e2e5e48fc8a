"""Kept so that old scripts get an answer: pipelines are `plgpu.emit_pipeline`."""


class PipelineParams:
    """Not part of the language: raises TypeError with the right form."""

    def __init__(self, *args, **kwargs):
        raise TypeError(
            "pipelines.PipelineParams does not exist; for a pipeline inside a kernel use"
            " plgpu.emit_pipeline(..., max_concurrent_steps=n), for pl.pallas_call pass"
            " compiler_params=plgpu.CompilerParams(max_concurrent_steps=n)"
        )
