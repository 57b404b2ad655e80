"""The core's own defaults, as a plugin that is asked last."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from .errors import ConfigError, ModelError
from .hookspecs import hookimpl
from .types import Provider, Request, Shortage, Victim, View, Want

if TYPE_CHECKING:
    import torch

    from .executor import Executor
    from .kernels import KernelBackend
    from .kv import CacheSpec, Capacity, KVCache
    from .model import Checkpoint, Model, ModelSpec
    from .registry import Plugins
    from .sampling import SampleBatch, Sampled
    from .settings import Settings


class Defaults:
    """Resolves providers by name, admits in arrival order, preempts whoever ranks last."""

    def __init__(self, plugins: Plugins) -> None:
        self._plugins = plugins
        self.checkpoint: Checkpoint | None = None
        """What the executor is built for; set at start-up."""

    @hookimpl
    def providers(self) -> Iterable[Provider]:
        return [
            Provider(
                "executor",
                "torch",
                _torch_executor,
                summary="runs the model with torch in the engine process",
            )
        ]

    @hookimpl(trylast=True)
    def executor(self, settings: Settings) -> Executor:
        created: Executor = self._plugins.create(
            "executor",
            settings.executor,
            settings.executor_opt,
            settings=settings,
            plugins=self._plugins,
            checkpoint=self.checkpoint,
        )
        return created

    @hookimpl(trylast=True)
    def kv_cache(self, settings: Settings, cache_spec: CacheSpec, capacity: Capacity) -> KVCache:
        created: KVCache = self._plugins.create(
            "kv",
            settings.kv,
            settings.kv_opt,
            settings=settings,
            plugins=self._plugins,
            cache_spec=cache_spec,
            capacity=capacity,
        )
        return created

    @hookimpl(trylast=True)
    def model(
        self,
        settings: Settings,
        spec: ModelSpec,
        backend: KernelBackend,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Model:
        return model_class(self._plugins, settings, spec.architecture)(spec, backend, dtype, device)

    @hookimpl(trylast=True)
    def kernel_backend(
        self, settings: Settings, spec: ModelSpec, dtype: torch.dtype, device: torch.device
    ) -> KernelBackend:
        """The named backend, or with "auto" the first that supports every operation here."""
        auto = settings.kernel == "auto"
        if auto and settings.kernel_opt:
            given = next(iter(settings.kernel_opt))
            have = [
                p.name for p in self._plugins.providers("kernel") if given in getattr(p.options, "model_fields", ())
            ]
            named = f", such as --kernel {have[0]}" if have else ""
            raise ConfigError(f"--kernel-opt {given}: options are those of one backend; name it{named}")
        names = [p.name for p in self._plugins.providers("kernel")] if auto else [settings.kernel]
        reasons: list[str] = []
        for name in names:
            context = {"settings": settings, "spec": spec, "dtype": dtype, "device": device}
            backend: KernelBackend = self._plugins.create("kernel", name, settings.kernel_opt, **context)
            reason = _unsupported(backend, settings, spec, dtype, device)
            if reason is None:
                backend.declined = tuple(reasons)
                return backend
            reasons.append(f"{name}: {reason}")
        if auto:
            raise ConfigError(f"--kernel auto: no backend can serve this model here ({'; '.join(reasons)})")
        raise ConfigError(f"--kernel {reasons[0]}; auto takes the first backend that can serve this model here")

    @hookimpl(trylast=True)
    def admit(self, view: View) -> Iterable[Want]:
        return (Want(r) for r in view.waiting)

    @hookimpl(trylast=True)
    def preempt(self, beneficiary: Request, shortage: Shortage, candidates: Sequence[Request]) -> Victim | None:
        """For a running beneficiary the last candidate; a waiting one preempts nobody."""
        return Victim(candidates[-1]) if beneficiary.status == "running" else None

    @hookimpl(trylast=True)
    def sample(self, logits: torch.Tensor, batch: SampleBatch) -> Sampled:
        from .sampling import Sampled

        return Sampled(logits.argmax(-1))


def model_class(plugins: Plugins, settings: Settings, architecture: str) -> type[Model]:
    """The model provider named by --model-impl, or the first that lists the architecture. Raises `ModelError`."""
    if settings.model_impl != "auto":
        named: type[Model] = plugins.create("model", settings.model_impl)
        return named
    known: list[str] = []
    for provider in plugins.providers("model"):
        candidate: type[Model] = plugins.create("model", provider.name)
        if architecture in candidate.architectures:
            return candidate
        known += candidate.architectures
    raise ModelError(f"architecture {architecture} is not supported; supported: {', '.join(sorted(known))}")


def _torch_executor(**context: Any) -> Executor:
    from .worker import TorchExecutor

    return TorchExecutor(context["settings"], context["plugins"], context["checkpoint"])


def _unsupported(
    backend: KernelBackend, settings: Settings, spec: ModelSpec, dtype: torch.dtype, device: torch.device
) -> str | None:
    from .kernels import OPS

    if backend.block_sizes and settings.block_size not in backend.block_sizes:
        return f"block size {settings.block_size} is not one of {', '.join(map(str, backend.block_sizes))}"
    if settings.quantization not in ("none", *backend.quantizations):
        return f"it has no --quantization {settings.quantization}"
    if settings.kv_dtype not in ("auto", *backend.kv_dtypes):
        return f"it has no --kv-dtype {settings.kv_dtype}"
    reasons: dict[str, str] = {}
    for window in dict.fromkeys(spec.windows):
        for op in OPS:
            support = backend.supports(op, dtype, device, head_dim=spec.head_dim, window=window)
            if not support.ok:
                reasons[op] = support.reason
    if len(reasons) == len(OPS) and len(set(reasons.values())) == 1:  # nothing about an operation
        return reasons[OPS[0]]
    return next((f"{op}: {reason}" for op, reason in reasons.items()), None)
