"""What projects for Lightning contain: each idiom with what `stratagem migrate --write` makes of it, or what it advises.

`TRAINER`: arguments of a Trainer, before and after. `MODULE` and `CALLBACK`: bodies of classes, before and a part of what they
are after. `SCRIPT`: statements after training. `ADVICE`: statements that stay, and the advice.
"""

TRAINER = {
    "gpus=2": 'accelerator="gpu", devices=2',
    "gpus=-1": 'accelerator="gpu", devices=-1',
    "gpus=[0]": 'accelerator="gpu", devices=[0]',
    "gpus=0": 'accelerator="cpu"',
    "gpus=None": 'accelerator="cpu"',
    "gpus=1 if torch.cuda.is_available() else 0":
        'accelerator="gpu" if torch.cuda.is_available() else "cpu", devices=1',
    "gpus=1 if torch.cuda.is_available() else None":
        'accelerator="gpu" if torch.cuda.is_available() else "cpu", devices=1',
    "num_processes=2": 'accelerator="cpu", devices=2',
    "num_processes=1": "",
    "devices=0": 'accelerator="cpu"',
    "tpu_cores=None": "",
    "ipus=None": "",
    "auto_select_gpus=False": "",
    'accelerator="ddp"': 'strategy="ddp"',
    'accelerator="ddp_cpu", num_processes=2': 'accelerator="cpu", strategy="ddp_spawn", devices=2',
    'distributed_backend="ddp"': 'strategy="ddp"',
    "distributed_backend=None": "",
    'strategy="fsdp_native"': 'strategy="fsdp"',
    'plugins="ddp_sharded"': 'strategy="ddp_sharded"',
    "plugins=None": "",
    "callbacks=[pl.callbacks.TQDMProgressBar(refresh_rate=20)]": "callbacks=[TQDMProgressBar()]",
    "callbacks=[pl.callbacks.ProgressBar(refresh_rate=10, process_position=0)]": "callbacks=[ProgressBar()]",
    "callbacks=[pl.callbacks.RichProgressBar(5, leave=True)]": "callbacks=[ProgressBar()]",
    "callbacks=[pl.callbacks.BackboneFinetuning(2, should_align=True, verbose=True)]":
        "callbacks=[BackboneFinetuning(2)]",
    "callbacks=[pl.callbacks.LearningRateFinder(mode='exponential')]": "callbacks=[LearningRateFinder()]",
    'accelerator="ddp", plugins="ddp_sharded"': 'strategy="ddp_sharded"',
    'strategy="ddp", plugins="ddp_sharded"': 'strategy="ddp_sharded"',
    "strategy=pl.strategies.FSDPStrategy(activation_checkpointing=None)": "strategy=FSDPStrategy()",
    "strategy=pl.strategies.ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1)":
        "strategy=ParallelStrategy(shard=1, tensor=1)",
    "strategy=pl.strategies.ModelParallelStrategy(1, 1, timeout=None)":
        "strategy=ParallelStrategy(shard=1, tensor=1, timeout=None)",
    'plugins=["native_amp"]': 'precision="16-mixed"',
    "plugins=pl.plugins.DDPPlugin(find_unused_parameters=False)": "strategy=DDPStrategy(find_unused_parameters=False)",
    "strategy=pl.strategies.DDPStrategy(find_unused_parameters=True)":
        "strategy=DDPStrategy(find_unused_parameters=True)",
    "strategy=pl.strategies.DDPSpawnStrategy()": 'strategy=DDPStrategy(start_method="spawn")',
    "replace_sampler_ddp=False": "use_distributed_sampler=False",
    "checkpoint_callback=False": "enable_checkpointing=False",
    "checkpoint_callback=True": "enable_checkpointing=True",
    'checkpoint_callback=pl.callbacks.ModelCheckpoint(monitor="a")': 'callbacks=[ModelCheckpoint(monitor="a")]',
    "early_stop_callback=False": "",
    "early_stop_callback=True": 'callbacks=[{"name": "early_stopping", "monitor": "val_loss"}]',
    'early_stop_callback=pl.callbacks.EarlyStopping("a")': 'callbacks=[EarlyStopping("a")]',
    'weights_summary="full"': 'callbacks=[{"name": "model_summary", "max_depth": -1}]',
    'weights_summary="top"': "enable_model_summary=True",
    "weights_summary=None": "enable_model_summary=False",
    "progress_bar_refresh_rate=0": "enable_progress_bar=False",
    "progress_bar_refresh_rate=20": "",
    "process_position=0": "",
    "resume_from_checkpoint=None": "",
    "terminate_on_nan=False": "",
    "track_grad_norm=-1": "",
    'track_grad_norm=2, logger="csv"': 'callbacks=["gradient_norms"]',
    'log_gpu_memory="all", logger="csv"': 'callbacks=["device_stats"]',
    "log_gpu_memory=None": "",
    "auto_lr_find=False": "",
    "auto_scale_batch_size=False": "",
    "stochastic_weight_avg=False": "",
    "move_metrics_to_cpu=False": "",
    "benchmark=False": "",
    "amp_backend='native'": "",
    "truncated_bptt_steps=None": "",
    "prepare_data_per_node=True": "",
    "reload_dataloaders_every_epoch=False": "",
    "multiple_trainloader_mode='max_size_cycle'": "",
    "profiler=True": 'profiler="simple"',
    "profiler=pl.profilers.SimpleProfiler()": 'profiler="simple"',
    "profiler=pl.profilers.AdvancedProfiler()": 'profiler="advanced"',
    "gradient_clip_val=0": "",
    "max_time={'minutes': 5}": "max_time=timedelta(minutes=5)",
    "max_nb_epochs=3": "max_epochs=3",
    "train_percent_check=0.5": "limit_train_batches=0.5",
    "val_percent_check=0.5": "limit_val_batches=0.5",
    "row_log_interval=5": "log_every_n_steps=5",
    "callbacks=[pl.callbacks.ModelCheckpoint(monitor='a', period=2)]":
        "callbacks=[ModelCheckpoint(monitor='a', every_n_epochs=2)]",
    "callbacks=[pl.callbacks.DeviceStatsMonitor(True)], logger=True":
        "callbacks=[DeviceStats(cpu_stats=True)], logger=True",
    "callbacks=[pl.callbacks.LearningRateMonitor('step')], logger=True":
        "callbacks=[LearningRateMonitor('step')], logger=True",
    "callbacks=[pl.callbacks.RichModelSummary(max_depth=2)]": "callbacks=[ModelSummary(max_depth=2)]",
    "callbacks=[pl.callbacks.TQDMProgressBar(process_position=1)]": "callbacks=[TQDMProgressBar()]",
    "logger=pl.loggers.CSVLogger('logs', flush_logs_every_n_steps=5)":
        "logger=CSVLogger('logs', flush_every_n_steps=5)",
    "logger=pl.loggers.TensorBoardLogger('logs', name='a')": "logger=TensorBoardLogger('logs', name='a')",
}  # fmt: skip

MODULE = {
    "def validation_epoch_end(self, outputs):\n    self.log('worst', max(outputs))":
        "def on_validation_epoch_end(self):\n    outputs, self.validation_step_outputs = "
        "self.validation_step_outputs, []\n    self.log('worst', max(outputs))",
    "def training_epoch_end(self, outputs):\n    self.log('worst', max(each['loss'] for each in outputs))":
        "self.training_step_outputs.append(",
    "def test_epoch_end(self, outs):\n    pass": "def on_test_epoch_end(self):",
    "def on_train_batch_end(self, outputs, batch, batch_idx, dataloader_idx):\n    pass":
        "def on_train_batch_end(self, outputs, batch, batch_idx):",
    "def on_train_batch_end(self, outputs, batch, batch_idx, unused):\n    pass":
        "def on_train_batch_end(self, outputs, batch, batch_idx):",
    "def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_idx, optimizer_closure, on_tpu, using_native_amp, "
    "using_lbfgs):\n    optimizer.step(closure=optimizer_closure)":
        "def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):",
    "def optimizer_zero_grad(self, epoch, batch_idx, optimizer, optimizer_idx):\n    optimizer.zero_grad()":
        "def optimizer_zero_grad(self, epoch, batch_idx, optimizer):",
    "def backward(self, loss, optimizer, optimizer_idx):\n    loss.backward()": "def backward(self, loss):",
    "def lr_scheduler_step(self, scheduler, optimizer_idx, metric):\n    scheduler.step()":
        "def lr_scheduler_step(self, scheduler, metric):",
    "def on_before_optimizer_step(self, optimizer, optimizer_idx):\n    pass":
        "def on_before_optimizer_step(self, optimizer):",
    "def training_end(self, output):\n    return output": "def training_step_end(self, output):",
    "def on_fit_start(self):\n    self.kind = self.on_gpu": 'self.kind = (self.device.type == "cuda")',
    "def on_fit_start(self):\n    self.kind = self.use_ddp": "self.kind = (self.trainer.world_size > 1)",
    "def on_fit_start(self):\n    self.kind = self.datamodule": "self.kind = self.trainer.datamodule",
    "def on_fit_start(self):\n    self.trainer.strategy.barrier()": "self.trainer.run.collectives.barrier()",
    "def on_fit_start(self):\n    self.trainer.training_type_plugin.barrier('a')":
        "self.trainer.run.collectives.barrier()",
    "def on_fit_start(self):\n    self.kind = self.trainer.strategy.broadcast(1)":
        "self.kind = self.trainer.run.collectives.broadcast_object(1)",
    "def on_fit_start(self):\n    self.kind = self.trainer.strategy.root_device": "self.kind = self.trainer.run.device",
    "def on_fit_start(self):\n    self.kind = self.trainer.running_sanity_check":
        "self.kind = self.trainer.sanity_checking",
    "def configure_model(self):\n    self.kind = lambda: self.device_mesh['tensor_parallel']":
        'self.device_mesh["tensor"]',
    "def on_train_batch_end(self, outputs, batch, batch_idx):\n    self.seen = outputs['loss'].item()":
        "self.seen = outputs.detach().item()",
    "def on_train_epoch_end(self):\n    self.log('a', 1.0, True)": "self.log('a', 1.0, prog_bar=True)",
    "def on_train_epoch_end(self):\n    self.log('a', 1.0, tbptt_pad_token=0)": "self.log('a', 1.0)",
    "def on_train_epoch_end(self):\n    self.log_dict({'a': 1.0}, True, False)":
        "self.log_dict({'a': 1.0}, prog_bar=True, logger=False)",
    "@pl.utilities.rank_zero_only\ndef on_fit_start(self):\n    print('once')":
        "def on_fit_start(self):\n    if self.global_rank != 0:\n        return None\n    print('once')",
}  # fmt: skip

CALLBACK = {
    "def on_train_start(self, trainer, pl_module):\n    print(pl_module)":
        "@sg.hookimpl\ndef on_train_start(self, trainer, module):\n    print(module)",
    "def on_train_end(self, trainer, pl_module):\n    super().on_train_end(trainer, pl_module)\n    print(trainer)":
        "@sg.hookimpl\ndef on_train_end(self, trainer, module):\n    print(trainer)",
    "def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, unused=0):\n    print(outputs)":
        "def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):",
    "def on_validation_batch_end(self, trainer, net, outputs, batch, batch_idx, dataloader_idx=0):\n    print(net)":
        "def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx, dataloader_idx):",
    "def setup(self, trainer, pl_module, stage=None):\n    print(stage)": "def setup(self, trainer, module, stage):",
    "def on_before_zero_grad(self, trainer, pl_module, optimizer):\n    print(optimizer)":
        "def on_before_zero_grad(self, trainer, module, optimizer):",
    "def on_save_checkpoint(self, trainer, pl_module, checkpoint):\n    checkpoint['a'] = 1":
        "def on_save_checkpoint(self, trainer, module, checkpoint):",
    "def on_exception(self, trainer, pl_module, exception):\n    print(exception)":
        "def on_exception(self, trainer, module, exception):",
    "@pl.utilities.rank_zero_only\ndef on_train_end(self, trainer, pl_module):\n    print('once')":
        "@sg.hookimpl\ndef on_train_end(self, trainer, module):\n    if not trainer.is_global_zero:\n        return None",
}  # fmt: skip

SCRIPT = {
    "from pytorch_lightning.utilities import CombinedLoader\nCombinedLoader([[1]])":
        "from stratagem import CombinedLoader\nCombinedLoader([[1]])",
    "pl.utilities.rank_zero_info('a')": "sg.rank_zero_info('a')",
    "class Unfreeze(pl.callbacks.BaseFinetuning):\n    pass": "class Unfreeze(BaseFinetuning):",
    "trainer.fit(model, train_dataloader=loader)": "trainer.fit(model, train_dataloaders=loader)",
    "trainer.validate(model, val_dataloaders=loader)": "trainer.validate(model, dataloaders=loader)",
    "trainer.test(model, test_dataloaders=loader, verbose=True)": "trainer.test(model, dataloaders=loader",
    "@pl.utilities.rank_zero_only\ndef report():\n    print(1)\nreport()":
        "@sg.rank_zero_only\ndef report():\n    print(1)\nreport()",
    "from pytorch_lightning.utilities import rank_zero_only\n@rank_zero_only\ndef report():\n    print(1)\nreport()":
        "from stratagem import rank_zero_only\n@rank_zero_only\ndef report():\n    print(1)\nreport()",
    "pl.seed_everything(1, True)": "sg.seed_everything(1, workers=True)",
    "pl.seed_everything(1, verbose=False)": "sg.seed_everything(1, verbose=False)",
    "if trainer.is_global_zero:\n    trainer.save_checkpoint('last.ckpt')": "trainer.save_checkpoint('last.ckpt')",
    "trainer.save_checkpoint('last.ckpt')\nNet.load_from_checkpoint(checkpoint_path='last.ckpt', weights_only=True)":
        "Net.load_from_checkpoint(checkpoint_path='last.ckpt')",
    "print(trainer.get_model())": "print(trainer.module)",
    "print(trainer.progress_bar_dict)": "print(trainer.progress_bar_metrics)",
    "print(trainer.training_type_plugin)": "print(trainer.strategy)",
    "os.environ.pop('PL_GLOBAL_SEED', None)": "os.environ.pop('STRATAGEM_SEED', None)",
    "from pytorch_lightning.utilities.types import STEP_OUTPUT\nkind: STEP_OUTPUT = 1": "kind: Any = 1",
    "from pytorch_lightning.utilities import move_data_to_device\nmove_data_to_device(1, 'cpu')":
        "move_batch(1, 'cpu')",
    "from pytorch_lightning.utilities.exceptions import MisconfigurationException as Wrong\nissubclass(Wrong, ValueError)":
        "from stratagem.errors import ConfigError as Wrong",
    "from lightning.fabric.utilities.apply_func import apply_to_collection\napply_to_collection([1], int, str)":
        "from lightning_utilities.core.apply_func import apply_to_collection",
}  # fmt: skip

#: Statements, the certainty of the finding, and the beginning of the advice.
ADVICE = [
    ("pl.Trainer(gpus=args.gpus)", "change", 'accelerator="gpu", devices=args.gpus'),
    ('pl.Trainer(gpus="3")', "change", 'accelerator="gpu", devices=3; if gpus="3" meant the device'),
    ("pl.Trainer(amp_level='O2')", "change", "leave it out, mixed precision is torch's"),
    ("pl.Trainer(weights_save_path='a')", "change", "stratagem.callbacks.ModelCheckpoint(dirpath='a')"),
    ("pl.Trainer(auto_lr_find=True)", "change", 'callbacks=["learning_rate_finder"]'),
    ("pl.Trainer(stochastic_weight_avg=True)", "change", 'callbacks=["stochastic_weight_averaging"]'),
    ("pl.Trainer(terminate_on_nan=True)", "change", "detect_anomaly=True"),
    ("pl.Trainer(truncated_bptt_steps=2)", "change", "automatic_optimization = False"),
    ("pl.Trainer(strategy='hpu_parallel')", "change", 'strategy="auto" (HPUs are not supported)'),
    ("pl.Trainer.from_argparse_args(args)", "change", "stratagem.Trainer.from_cli()"),
    ("parser.add_argument('--batch_size')\npl.Trainer.from_argparse_args(args)", "change",
     "args, rest = parser.parse_known_args(), and stratagem.Trainer.from_cli(rest)"),
    ("parser.add_argument('--batch_size')\npl.Trainer.from_cli()", "change", "args, rest = parser.parse_known_args()"),
    ("trainer = pl.Trainer()\ntrainer.callbacks.append(callback)", "change", "Trainer(callbacks=[...])"),
    ("pl.callbacks.TQDMProgressBar(refresh_rate=0)", "change", "leave it out, the bar is updated by time"),
    ("pl.callbacks.BackboneFinetuning(lambda_func=lambda epoch: 1.5)", "change", "multiplier=, its factor"),
    ("pl.Trainer(weights_summary=['full'])", "change", "enable_model_summary=True"),
    ("pl.Trainer(strategy=pl.strategies.ModelParallelStrategy())", "change", "stratagem.strategies.ParallelStrategy("),
    ("pl.strategies.ModelParallelStrategy(tensor_parallel_size=2, data_parallel_size='auto')", "change",
     "stratagem.strategies.ParallelStrategy("),
    ("class Net(pl.LightningModule):\n    def configure_model(self):\n        print(self.device_mesh['data_parallel'])",
     "change", "leave it out, with the fully_shard that uses it"),
    ("class A(pl.strategies.DDPStrategy):\n    def configure_ddp(self):\n        pass", "change",
     'strategy={"name": "ddp", ...}'),
    ("from pytorch_lightning.plugins import DDPPlugin\nclass A(DDPPlugin):\n    pass", "change", "a strategy plugin, docs/"),
    ("from lightning.pytorch.demos.boring_classes import BoringModel\nBoringModel()", "change", ""),
    ("from pytorch_lightning.utilities import deepspeed\ndeepspeed.convert_zero_checkpoint_to_fp32_state_dict(a, b)",
     "change", "`stratagem checkpoint consolidate`"),
    ("from lightning.pytorch.utilities.memory import is_oom_error\nis_oom_error(a)", "change", ""),
    ("import lightning\nlightning.Fabric()", "change", "stratagem.Run"),
    ("import lightning.fabric\nlightning.fabric.Fabric()", "change", "stratagem.Run"),
    ("from lightning.fabric import Fabric\nFabric()", "change", "stratagem.Run"),
    ("pl.cli.LightningCLI(Net)", "change", "`stratagem fit run.yaml`"),
    ("pl.callbacks.ModelPruning()", "change", ""),
    ("pl.loggers.CometLogger()", "change", ""),
    ("class A(pl.LightningModule):\n    def backward(self, loss, optimizer, optimizer_idx):\n        print(optimizer)", "change",
     "def backward(self, loss)"),
    ("pl.Trainer()\nmodel.validation_step = None", "change", "Trainer(limit_val_batches=0)"),
    ("from lightning_utilities.core.rank_zero import rank_zero_info\nrank_zero_info('a')", "change",
     "if trainer.is_global_zero:"),
    ("from lightning_utilities.core.rank_zero import rank_zero_only\n@rank_zero_only\ndef report():\n    print(1)", "change",
     "stratagem.rank_zero_only"),
    ("class A(pl.LightningModule):\n    def on_epoch_end(self):\n        pass", "change", "def on_train_epoch_end(self)"),
    ("class A(pl.LightningModule):\n    def training_step(self, batch, batch_idx, optimizer_idx):\n        pass", "change",
     "automatic_optimization = False"),
    ("class A(pl.LightningModule):\n    def configure_optimizers(self):\n        return [a, b]", "change",
     "automatic_optimization = False"),
    ("class A(pl.LightningModule):\n    def on_train_epoch_start(self):\n        return -1", "check",
     "trainer.should_stop = True"),
    ("class A(pl.LightningModule):\n    def forward(self, x):\n        return x.cuda()", "check", "self.device"),
    ("class A(pl.Callback):\n    def teardown(self, trainer, pl_module, stage):\n        pass", "change",
     "@hookimpl def teardown(self, run)"),
    ("trainer = pl.Trainer()\ntrainer.tune(model)", "change", 'callbacks=["learning_rate_finder", "batch_size_finder"]'),
    ("trainer = pl.Trainer()\ntrainer.test()", "check", 'trainer.test(ckpt_path="best")'),
    ("trainer = pl.Trainer()\nif trainer.is_global_zero:\n    trainer.test(model)", "change", "all ranks call it"),
]  # fmt: skip
