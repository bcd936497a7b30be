"""Like warm.py, for packages whose loops are run.

It omits packages that change torch when imported, or need a mock of a module.
"""

import contextlib
import importlib
import io
import warnings

from shipped import absent

MODULES = """
art.estimators.classification avalanche.training.supervised baal.modelwrapper byol_pytorch
cleanlab.experimental.coteaching deepchem.models.torch_models deepctr_torch.models
deepod.models.tabular denoising_diffusion_pytorch facenet_pytorch imitation.algorithms.bc lpips
mmengine.model monai.engines monai.networks.nets neuralop.training open_clip_train.train pfrl
pycox.models pyod.models.auto_encoder pythae.trainers pytorch_accelerated
pytorch_metric_learning.trainers pytorch_tabnet.tab_model recbole.trainer rectified_flow_pytorch
rsl_rl.algorithms sb3_contrib sbi.inference segmentation_models_pytorch skorch snntorch
stable_baselines3 textbrewer torch_lr_finder torch_rechub.trainers torchbearer torchensemble
torchgan.trainer torchkge torchtnt.framework accelerate shardcast.accelerate shardcast.testing
shipped_generative shipped_learning shipped_loops shipped_rl shipped_science shipped_tables
"""

absent("wandb")
with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
    warnings.simplefilter("ignore")
    for name in MODULES.split():
        with contextlib.suppress(ImportError):  # the recipe reports it
            importlib.import_module(name)
