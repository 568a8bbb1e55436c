"""What ``odcengine.initialize`` does: bring ranks together, shard the model, make optimizer and loader."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sized
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from odcengine._summed_loss import LossFn
from odcengine.balance import CostModel, OnlineCost
from odcengine.config import Config, load_config
from odcengine.control import Phase
from odcengine.data import MinibatchLoader, TokenDataset
from odcengine.engine import OdcEngine
from odcengine.errors import ConfigError
from odcengine.metrics import FlopsOf
from odcengine.models import (
    WithoutAdapters,
    check_isolation,
    check_lengths,
    enable_checkpointing,
    find_vocabulary,
    is_transformers_model,
    load_model,
    model_flops,
    open_model,
    prepare_loss,
    prepare_model,
)
from odcengine.models.adapter import (
    adapt_stored,
    add_lora,
    freeze,
    is_adapted,
    make_masters,
    needs_weights,
)
from odcengine.models.stored import StoredModel
from odcengine.monitor import Monitor
from odcengine.optim import LENGTHS, build_optimizer, build_scheduler
from odcengine.ranks import read_rank_info
from odcengine.rollouts.balance import Balancer
from odcengine.rollouts.reference import Reference, ReferenceSource
from odcengine.sharding.base import Sharding
from odcengine.sharding.collective import CollectiveSharding
from odcengine.sharding.layout import find_groups, padding_notice
from odcengine.sharding.on_demand import OnDemandSharding, plan_windows, slots_of
from odcengine.sharding.report import describe_shards
from odcengine.sharding.wrap import block_modules, check_model, group_modules, shard_model
from odcengine.start import Job, equalize_weights, join, make_transport
from odcengine.transport.base import Grid, Transport

logger = logging.getLogger(__name__)

OptimizerSource = Optimizer | Callable[[Iterable[torch.Tensor]], Optimizer]
SchedulerSource = LRScheduler | Callable[[Optimizer], LRScheduler]


def initialize(
    *,
    model: nn.Module | None = None,
    config: str | os.PathLike[str] | Mapping[str, Any] | Config | None = None,
    training_data: Any | None = None,
    eval_data: Any | None = None,
    optimizer: OptimizerSource | None = None,
    lr_scheduler: SchedulerSource | None = None,
    loss_fn: LossFn | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    length_fn: Callable[[Any], int] | None = None,
    reference: ReferenceSource | None = None,
) -> tuple[OdcEngine, Optimizer, MinibatchLoader | None, LRScheduler | None]:
    """Bring all ranks together, shard the model and make what a training loop needs. Collective.

    Args:
        model: the model, materialised on the CPU or on this rank's GPU, the same on all ranks; rank 0's
            weights are given to all. It is sharded in place, on the GPU where the job has GPUs, and switched
            to training mode. None: the one that the configuration's ``model`` section names; of a directory
            of safetensors each rank then reads its own part only.
        config: path, mapping or :class:`~odcengine.config.Config`; by default the file that ``odc-launch
            --config`` was given.
        training_data: map-style data set for the loader (see :class:`~odcengine.data.MinibatchLoader`), or
            None for the one that the configuration's ``data.path`` names; where that is null too, the script
            brings its own batches.
        eval_data: held-out data of the same kind, or None for what ``data.eval_path`` names.
            ``engine.step()`` evaluates it at the end of each epoch and every ``data.eval_every_n_steps``
            steps (see ``engine.evaluate``).
        optimizer: an optimizer over ``model.parameters()`` that has not stepped yet, or a function that makes
            one from the sharded parameters; by default the one in the configuration.
        lr_scheduler: a scheduler of that optimizer, or a function that makes one from it; by default the one
            in the configuration. ``engine.step()`` steps it.
        loss_fn: ``loss_fn(model, micro_batch)`` returns the *summed* loss of a micro-batch of the loader; by
            default the token loss of a causal language model.
        collate_fn: makes a micro-batch from a list of samples; by default samples are packed.
        length_fn: length of a sample in tokens, for the load balancer.
        reference: a frozen model that is only evaluated, sharded over the same ranks by the same means:
            ``engine.reference``. A model like ``model``, or what the keys ``model.path`` and ``model.config``
            take; by default what the key ``model.reference`` names. Or ``WithoutAdapters(model)`` of
            ``odcengine.models``, as ``model.lora.reference`` has it: the model without its adapters of peft.

    Returns:
        ``(engine, optimizer, loader, scheduler)``; the last two are None where there is none.

    Raises:
        ConfigError: a mistake in the configuration, the environment, the model or the data.
        PeerError: another rank failed or did not come in time.
    """
    info = read_rank_info()
    source = info.config_file if config is None else config
    if source is None:
        raise ConfigError(
            "odcengine.initialize: give config=..., or start the script with odc-launch --config FILE SCRIPT "
            "(options of odc-launch stand before the script)"
        )
    settings = load_config(source)
    if settings.model.reference is not None:
        if reference is not None:
            raise ConfigError(
                "reference: odcengine.initialize was given one, and model.reference names "
                f"{settings.model.reference}; leave reference=... away, or remove the key"
            )
        reference = settings.model.reference
    adapters_off = settings.model.lora is not None and settings.model.lora.reference
    if adapters_off and reference is not None:
        raise ConfigError(
            "reference: odcengine.initialize was given one, and model.lora.reference says that it is the "
            "model without its adapters; leave reference=... away, or set the key to false"
        )
    if settings.odc.backend == "deepspeed":
        if reference is not None:
            raise ConfigError("reference: not with odc.backend: deepspeed; expected fsdp2")
        if eval_data is not None:
            raise ConfigError("eval_data: not with odc.backend: deepspeed; expected fsdp2")
        return _initialize_deepspeed(  # type: ignore[no-any-return]  # an engine with the same calls
            settings,
            model=model,
            training_data=training_data,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            loss_fn=loss_fn,
            collate_fn=collate_fn,
            length_fn=length_fn,
        )
    job = join(info, settings)
    control = job.control
    control.install_excepthook()
    engine: OdcEngine | None = None
    try:
        with control.phase(Phase.STARTING):
            if info.rank == 0:
                for notice in settings.notices:
                    logger.warning("config: %s", notice)
            stored = _open_stored(settings, model)
            model = _build_model(settings, model) if stored is None else stored.model
            if stored is not None:
                freeze(model, settings.model.freeze or ())
            if settings.bf16.enabled:
                make_masters(model)  # computation is cast by FSDP2
            blocks = block_modules(model, settings.odc.wrap)
            groups = group_modules(model, settings.odc.wrap, settings.odc.experts)
            check_model(model, groups, job.device.type, stored=stored is not None)
            if adapters_off:
                reference = WithoutAdapters(model)
            view = _view_of(reference, model)
            frozen = None
            if reference is not None and view is None:
                frozen = Reference.open(reference, settings, model)
            if frozen is not None:
                frozen_blocks = block_modules(frozen.model, settings.odc.wrap)
                check_model(
                    frozen.model,
                    frozen_blocks,
                    job.device.type,
                    stored=frozen.stored is not None,
                    frozen=True,
                )
            loader, costs = None, _costs(model, settings, job)
            training_data = _open_data("path", settings.data.path, training_data, "training_data")
            eval_data = _open_data("eval_path", settings.data.eval_path, eval_data, "eval_data")
            make_held_out = functools.partial(
                _make_loader,
                model,
                config=settings,
                job=job,
                costs=costs,
                collate_fn=collate_fn,
                length_fn=length_fn,
            )
            if training_data is not None:
                loader = _build_loader(
                    model, training_data, settings, job, costs, collate_fn, length_fn, loss_fn
                )
            # After the loader has tried the model, which would compile for that.
            if settings.model.compile and stored is None:
                _compile(model, blocks)
            packs = loader is not None and loader.packs
            if frozen is not None and packs:
                frozen.prepare(low_precision=settings.bf16.enabled, sharded=False)
            sharding, transport, parameters = _shard(model, groups, settings, job, optimizer, stored, frozen)
            made = _build_optimizer(settings, optimizer, parameters)
            scheduler = _build_scheduler(settings, lr_scheduler, made, loader)
            monitor = Monitor(settings, job, sharding, loader, flops_of=_flops_of(model))
            balancer = Balancer(job, settings, costs, monitor.balanced, collate_fn)
            model.train()  # from_pretrained leaves models in evaluation mode
            engine = OdcEngine(
                model,
                made,
                sharding,
                transport,
                job,
                settings,
                monitor=monitor,
                balancer=balancer,
                scheduler=scheduler,
                loader=loader,
                loss_fn=loss_fn,
                make_held_out=make_held_out,
                reference=view if frozen is None else frozen.model,
                steps_of_schedule=_steps_of_schedule(settings, lr_scheduler, loader),
            )
            if frozen is not None and packs:
                frozen.prepare(low_precision=settings.bf16.enabled, sharded=True)
            if stored is not None:
                _try_out(engine, loader)
                if settings.model.compile:
                    _compile(model, blocks)
            if eval_data is not None:
                engine.hold_out(eval_data)
            elif settings.data.eval_every_n_steps and info.rank == 0:
                logger.warning(
                    "data.eval_every_n_steps has no effect: there is no eval_data, nor data.eval_path"
                )
            engine._resume()
        control.enter(Phase.BETWEEN, step=engine.global_steps, micro_batch=0)
    except BaseException:
        if engine is not None:
            engine._stop.close()  # signals have their usual effect again
            engine._forget_exit()  # there is nothing left that could be closed
        control.close()  # the others have been told; a notebook may try again
        raise
    return engine, made, loader, scheduler


def _view_of(reference: ReferenceSource | None, model: nn.Module) -> WithoutAdapters | None:
    """The reference where it is the model that is trained, without its adapters; None for any other."""
    if not isinstance(reference, WithoutAdapters):
        return None
    if reference.adapted is not model:
        raise ConfigError(
            "reference: WithoutAdapters(...) of another model than the one that is trained; give "
            "odcengine.initialize(model=model, reference=WithoutAdapters(model))"
        )
    return reference


def _initialize_deepspeed(settings: Config, **arguments: Any) -> Any:
    try:
        from odcengine.deepspeed.build import initialize_deepspeed
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"odc.backend: deepspeed needs DeepSpeed ({error}); install it with "
            "DS_BUILD_OPS=0 pip install 'odcengine[deepspeed]'"
        ) from error
    return initialize_deepspeed(settings, **arguments)


def _open_stored(config: Config, model: nn.Module | None) -> StoredModel | None:
    """The configuration's model without its weights, where each rank can read its own part of them later."""
    section = config.model
    if model is not None or section.path is None:
        return None
    if section.lora is not None and needs_weights(section.lora):
        return None
    stored = open_model(
        section.path, dtype=section.dtype, gradient_checkpointing=section.gradient_checkpointing
    )
    if stored is None or section.lora is None:
        return stored
    return adapt_stored(stored, section.lora, base=section.path, random_seed=config.seed)


def _try_out(engine: OdcEngine, loader: MinibatchLoader | None) -> None:
    """What needs weights and was put off: prove that packed samples do not see each other. All ranks do."""
    if loader is not None and loader.packs:
        low = engine.config.bf16.enabled  # what the sharded model computes in
        check_isolation(engine.module, 0.05 if low else 1e-5)
        prepare_loss(engine.module, 0.01 if low else 1e-5)
        engine.train()


def _build_model(config: Config, model: nn.Module | None) -> nn.Module:
    section = config.model
    model = _load_model(config, model)
    if section.lora is not None:
        if is_adapted(model):
            raise ConfigError(
                "model.lora: the model that odcengine.initialize was given has an adapter of peft already; "
                "remove the section, or give the model without it"
            )
        base = section.path or getattr(model, "name_or_path", None) or None
        model = add_lora(model, section.lora, base=base, random_seed=config.seed)
    freeze(model, section.freeze or ())
    return model


def _load_model(config: Config, model: nn.Module | None) -> nn.Module:
    section = config.model
    source = section.path if section.path is not None else section.config
    if model is None:
        if source is None:
            raise ConfigError(
                "model: odcengine.initialize was given none, and the configuration names none; add "
                "`model: {path: DIRECTORY}`, or give model=..."
            )
        return load_model(
            source,
            dtype=section.dtype,
            random_seed=config.seed,
            gradient_checkpointing=section.gradient_checkpointing,
        )
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model: odcengine.initialize was given a {type(model).__name__}; give a torch.nn.Module, or "
            "name a directory in the configuration: model: {path: DIRECTORY}"
        )
    if source is not None or section.dtype is not None:
        raise ConfigError(
            "model: odcengine.initialize was given one, but the configuration's `model` section says how to "
            "load one; leave model=... away, or remove path, config and dtype from the section"
        )
    if section.gradient_checkpointing:
        enable_checkpointing(model)
    return model


def _compile(model: nn.Module, blocks: list[nn.Module]) -> None:
    from odcengine.models import compiled  # imports dynamo, which takes a second

    if not blocks:
        raise ConfigError(
            f"model.compile: only blocks are compiled, and none are known of {type(model).__name__}; name "
            "their classes in odc.wrap, or set it to false"
        )
    compiled.compile_blocks(blocks)


def _open_data(key: str, path: str | None, data: Any | None, argument: str) -> Any | None:
    if path is None:
        return data
    if data is not None:
        raise ConfigError(
            f"data: odcengine.initialize was given {argument}, and the configuration names {path}; leave "
            f"{argument}=... away, or remove data.{key}"
        )
    return TokenDataset.open(path)


def _build_loader(
    model: nn.Module,
    training_data: Any,
    config: Config,
    job: Job,
    costs: CostModel | OnlineCost,
    collate_fn: Callable[[list[Any]], Any] | None,
    length_fn: Callable[[Any], int] | None,
    loss_fn: LossFn | None,
) -> MinibatchLoader:
    batch = config.resolve_batch(job.topology.world_size)
    if job.topology.rank == 0:
        for notice in batch.notices:
            logger.warning("config: %s", notice)
    loader = _make_loader(
        model,
        training_data,
        train_batch_size=batch.train_batch_size,
        config=config,
        job=job,
        costs=costs,
        collate_fn=collate_fn,
        length_fn=length_fn,
    )
    if job.topology.rank == 0 and batch.train_batch_size > len(training_data):
        logger.warning(
            "train_batch_size is %d, but the data set has %d samples: every step has fewer",
            batch.train_batch_size,
            len(training_data),
        )
    if loader.packs and (loss_fn is None or is_transformers_model(model)):
        prepare_model(model)  # several samples share a row: attention must stop between them
        check_lengths(model, loader.longest, shared_rows=loader.max_samples != 1)
    return loader


def _make_loader(
    model: nn.Module,
    data: Any,
    *,
    train_batch_size: int | None = None,
    config: Config,
    job: Job,
    costs: CostModel | OnlineCost,
    collate_fn: Callable[[list[Any]], Any] | None,
    length_fn: Callable[[Any], int] | None,
) -> MinibatchLoader:
    """A loader of training data; without a batch size of held-out data: all in one minibatch, in order."""
    vocab_size = find_vocabulary(model)
    if isinstance(data, TokenDataset) and vocab_size is not None:
        data.check_vocabulary(vocab_size)
    trains = train_batch_size is not None
    num_samples = len(data) if isinstance(data, Sized) else 1
    return MinibatchLoader(
        data,
        train_batch_size=train_batch_size or max(1, num_samples),
        rank=job.topology.rank,
        world_size=job.topology.world_size,
        strategy=config.balance.strategy,
        max_tokens=config.balance.max_tokens_per_micro_batch,
        max_samples=config.train_micro_batch_size_per_gpu,
        seed=config.seed,
        shuffle=config.data.shuffle and trains,
        drop_last=config.data.drop_last and trains,
        cost=costs,
        max_length=config.data.max_length,
        too_long=config.data.too_long,
        length_fn=length_fn,
        collate_fn=collate_fn,
        draw=job.draw,
        run_empty=config.odc.lockstep or config.odc.transport == "collective",
        fields=config.data.fields,
        prefetch=config.data.prefetch,
        device=job.device.torch_device,
        timeout_s=config.odc.timeout_s,
        vocab_size=vocab_size,
    )


def _costs(model: nn.Module, config: Config, job: Job) -> CostModel | OnlineCost:
    # transformers notes it on every layer.
    recompute = any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules())
    shape = CostModel.for_model(model, recompute=recompute, trained=_trained_share(model))
    if not config.balance.learn_costs:
        return shape
    return OnlineCost(shape, num_ranks=job.topology.world_size, hosts=job.topology.hosts)


def _flops_of(model: nn.Module) -> FlopsOf | None:
    """Model FLOP of sequences; None where the model does not tell its shape."""
    config = getattr(model, "config", None)
    try:
        model_flops(config, [1])
    except ValueError:
        return None
    return functools.partial(model_flops, config, trained=_trained_share(model))


def _trained_share(model: nn.Module) -> float:
    parameters = list(model.parameters())
    return sum(p.numel() for p in parameters if p.requires_grad) / sum(p.numel() for p in parameters)


def _shard(
    model: nn.Module,
    blocks: list[nn.Module],
    config: Config,
    job: Job,
    optimizer: OptimizerSource | None,
    stored: StoredModel | None,
    frozen: Reference | None,
) -> tuple[Sharding, Transport | None, list[dict[str, Any]]]:
    """Shard the models, install the communication, and return the parameter groups for the optimizer."""
    bf16, topology = config.bf16.enabled, job.topology
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    equalize_weights(model, job, stored=None if stored is None else stored.weights.fingerprint)
    collective = config.odc.transport == "collective" or topology.world_size == 1
    param_dtype = torch.bfloat16 if bf16 else None
    mesh = init_device_mesh(job.device.type, (topology.world_size,))
    shard_model(
        model,
        blocks,
        mesh,
        param_dtype=param_dtype,
        # Collectives reduce in fp32. On demand a bf16 gradient is added to the fp32 accumulator as it is:
        # the sum is the same, at half the traffic.
        reduce_dtype=torch.float32 if bf16 and collective else None,
        reshard_after_forward=config.odc.reshard_after_forward,
    )
    if stored is not None:
        stored.fill(model, job.device.torch_device)
    sharded = dict(model.named_parameters())
    if isinstance(optimizer, Optimizer):
        parameters = _rename_groups(optimizer, names, sharded)
    else:
        parameters = [{"params": [p for p in sharded.values() if p.requires_grad]}]
    groups = find_groups(model, param_dtype)
    notice = padding_notice(groups, topology.world_size)
    if notice is not None and topology.rank == 0:
        logger.warning("model: %s", notice)
    both: nn.Module = model
    num_own = len(groups)
    if frozen is not None:
        _shard_reference(frozen, mesh, param_dtype, config, job)
        groups += frozen.groups(len(groups), param_dtype)
        both = nn.ModuleList([model, frozen.model])
    grid, deterministic = Grid.of(job.topology), config.odc.deterministic
    num_slots = slots_of(grid, deterministic=deterministic)
    windows = None if collective else plan_windows(groups, grid.num_nodes, num_slots)
    if topology.rank == 0:
        logger.info("%s", describe_shards(groups, num_own, windows))
    if windows is None:
        return CollectiveSharding(both, groups, job.control), None, parameters
    transport = make_transport(job, config, windows)
    sharding = OnDemandSharding(
        both,
        groups,
        transport,
        job.control,
        between_nodes=job.between_nodes,
        mark=job.device.mark,
        gradients_enqueued=job.device.gradients_enqueued,
        lockstep=config.odc.lockstep,
        deterministic=deterministic,
        chosen_experts=config.odc.experts == "chosen",
    )
    return sharding, transport, parameters


def _shard_reference(
    frozen: Reference, mesh: DeviceMesh, param_dtype: torch.dtype | None, config: Config, job: Job
) -> None:
    stored = frozen.stored
    equalize_weights(frozen.model, job, stored=None if stored is None else stored.weights.fingerprint)
    blocks = block_modules(frozen.model, config.odc.wrap)
    shard_model(frozen.model, blocks, mesh, param_dtype=param_dtype, reduce_dtype=None)
    if stored is not None:
        stored.fill(frozen.model, job.device.torch_device)


def _rename_groups(
    optimizer: Optimizer, names: Mapping[int, str], sharded: Mapping[str, nn.Parameter]
) -> list[dict[str, Any]]:
    """Parameter groups of an optimizer made before sharding, with the sharded parameters in place."""
    if optimizer.state:
        raise ConfigError(
            "optimizer: it has stepped before odcengine.initialize; its state belongs to whole parameters. "
            "Give a new optimizer, or a function that makes one"
        )
    groups = []
    for group in optimizer.param_groups:
        unknown = sum(id(parameter) not in names for parameter in group["params"])
        if unknown:
            raise ConfigError(
                f"optimizer: {unknown} of its parameters are not parameters of the model; make it from "
                "model.parameters(), or give a function that makes it"
            )
        groups.append({**group, "params": [sharded[names[id(p)]] for p in group["params"]]})
    return groups


def _build_optimizer(
    config: Config, source: OptimizerSource | None, parameters: list[dict[str, Any]]
) -> Optimizer:
    if isinstance(source, Optimizer):
        source.param_groups = parameters
        return source
    if source is not None:
        made: Optimizer = source(parameters[0]["params"])
        return made
    if config.optimizer is None:
        raise ConfigError(
            "optimizer: the configuration has none and odcengine.initialize was given none; add "
            "`optimizer: {type: AdamW, params: {lr: 1e-5}}`, or give optimizer=..."
        )
    return build_optimizer(config.optimizer, parameters)


def _build_scheduler(
    config: Config, source: SchedulerSource | None, optimizer: Optimizer, loader: MinibatchLoader | None
) -> LRScheduler | None:
    if isinstance(source, LRScheduler):
        if source.optimizer is not optimizer:
            raise ConfigError("lr_scheduler: it belongs to another optimizer than the engine's")
        return source
    if source is not None:
        return source(optimizer)
    return build_scheduler(config.scheduler, optimizer, _steps_of_run(config, loader))


def _steps_of_run(config: Config, loader: MinibatchLoader | None) -> int | None:
    return None if loader is None else len(loader) * config.data.num_epochs


def _steps_of_schedule(
    config: Config, source: SchedulerSource | None, loader: MinibatchLoader | None
) -> int | None:
    """Length of the schedule where it is that of the run; None where the user chose it, or it has no end."""
    if source is not None or config.scheduler is None:
        return None
    params = config.scheduler.params.model_dump()
    follows = any(key in params and params[key] is None for key in LENGTHS)
    return _steps_of_run(config, loader) if follows else None
