"""The backends that compute the parts of a model."""

from dataclasses import dataclass, field
from itertools import pairwise

from hotcold.kernels.backend import Backend, FFNTensors, FFNWeights, PredictorTensors, PredictorWeights


@dataclass(frozen=True)
class Devices:
    """The backends of a model's parts: the embedding, every layer with its keys and values, the head.
    ``gpus`` are further GPUs, without the embedding's."""

    embedding: Backend
    layers: tuple[Backend, ...]
    head: Backend
    gpus: tuple[Backend, ...] = field(default=(), kw_only=True)

    @classmethod
    def from_backend(cls, backend: "Backend | Devices", layers: int) -> "Devices":
        """Returns the given devices, or one backend for all parts."""
        return backend if isinstance(backend, Devices) else cls(backend, (backend,) * layers, backend)

    @property
    def parts(self) -> tuple[Backend, ...]:
        """The backends of all parts in order: part 0 is the embedding, part i layer i - 1, then the head."""
        return self.embedding, *self.layers, self.head

    @property
    def stages(self) -> list[range]:
        """Runs of neighbouring parts on one backend."""
        parts = self.parts
        starts = [i for i, part in enumerate(parts) if i == 0 or part is not parts[i - 1]]
        return [range(*ends) for ends in pairwise([*starts, len(parts)])]

    @property
    def identity(self) -> str:
        """A text with the kind of backend of each part."""
        return ",".join(part.name for part in self.parts)

    def ffn_weights(self, layer: int, tensors: FFNTensors) -> FFNWeights:
        return self.layers[layer].ffn_weights(tensors)

    def predictor_weights(self, layer: int, tensors: PredictorTensors) -> PredictorWeights:
        return self.layers[layer].predictor_weights(tensors)
