"""Updates of reinforcement learning packages, on random transitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from harness import Report, Variant
from recipes import recipe
from shipped import averaged, edited, seeded, surrounded
from torch import nn

CLIP = (
    "th.nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_grad_norm)",
    "clip(self.policy, self.policy.optimizer, self.max_grad_norm)",
)


def environment(discrete: bool) -> Any:
    import gymnasium

    class Drawn(gymnasium.Env):  # type: ignore[type-arg]
        observation_space = gymnasium.spaces.Box(-1, 1, (5,))
        action_space = (
            gymnasium.spaces.Discrete(3) if discrete else gymnasium.spaces.Box(-1, 1, (2,))
        )

        def reset(self, **options: Any) -> Any:
            return np.zeros(5, "float32"), {}

        def step(self, action: Any) -> Any:
            return np.zeros(5, "float32"), 0.0, False, False, {}

    return Drawn()


def of_baselines(variant: Variant, cls: Any, discrete: bool, **options: Any) -> Any:
    from stable_baselines3.common.logger import Logger

    model = cls(
        "MlpPolicy",
        environment(discrete),
        device="cpu",
        seed=0,
        policy_kwargs={"net_arch": [16, 16]},
        **options,
    )
    model.set_logger(Logger(None, []))
    return model


def on_policy(
    variant: Variant, cls: Any, updates: int = 4, ported: bool = True, **options: Any
) -> Report:
    model = of_baselines(variant, cls, discrete=True, n_steps=32, **options)
    variant.starts(model.policy)
    model.policy.optimizer = averaged(variant, model.policy, model.policy.optimizer)
    train = edited(cls.train, CLIP, clip=variant.clip) if ported else cls.train
    rng, losses = seeded(variant), []
    with surrounded(variant):
        for _ in range(updates):
            buffer = model.rollout_buffer
            buffer.reset()
            for _ in range(32):
                actions = torch.randint(0, 3, (1, 1), generator=rng)
                draws = torch.randn(8, generator=rng)
                buffer.add(
                    draws[None, :5].numpy(),
                    actions.numpy(),
                    draws[5:6].numpy(),
                    np.zeros(1),
                    draws[6:7],
                    -1 + 0.1 * draws[7:8],
                )
            buffer.compute_returns_and_advantage(torch.zeros(1), np.zeros(1))
            train(model)
            losses.append(model.logger.name_to_value["train/value_loss"])
    return variant.report(model.policy, losses)


@recipe("A2C.train()", "stable-baselines3", shipped="clip")
def sb3_a2c(variant: Variant) -> Report:
    from stable_baselines3 import A2C

    return on_policy(variant, A2C, 8)


@recipe("PPO.train(), four epochs of minibatches", "stable-baselines3", shipped="clip")
def sb3_ppo(variant: Variant) -> Report:
    from stable_baselines3 import PPO

    return on_policy(variant, PPO, batch_size=8, n_epochs=4)


def remembered(variant: Variant, model: Any, discrete: bool) -> None:
    rng = seeded(variant)
    for _ in range(64):
        draws = torch.randn(13, generator=rng).clamp(-1, 1).numpy()
        action = np.abs(draws[10:11] * 2.9).astype(int) if discrete else draws[10:12]
        model.replay_buffer.add(
            draws[None, :5], draws[None, 5:10], action[None], draws[12:13], np.zeros(1), [{}]
        )


@recipe("DQN.train()", "stable-baselines3", shipped="clip")
def sb3_dqn(variant: Variant) -> Report:
    from stable_baselines3 import DQN

    return q_learning(variant, DQN)


@recipe("QRDQN.train(): quantiles", "sb3-contrib", shipped="clip")
def sb3_qrdqn(variant: Variant) -> Report:
    from sb3_contrib import QRDQN

    return q_learning(variant, QRDQN, max_grad_norm=10.0)


def q_learning(variant: Variant, cls: Any, **options: Any) -> Report:
    model = of_baselines(variant, cls, True, buffer_size=64, **options)
    of_policy = model.policy.q_net if hasattr(model.policy, "q_net") else model.policy.quantile_net
    variant.starts(of_policy)
    model.policy.optimizer = averaged(variant, of_policy, model.policy.optimizer)
    remembered(variant, model, discrete=True)
    train, losses = edited(cls.train, CLIP, clip=variant.clip), []
    with surrounded(variant):
        for _ in range(5):
            train(model, 2, 16)
            losses.append(model.logger.name_to_value["train/loss"])
    return variant.report(of_policy, losses)


@recipe("SAC.train(): two critics, a learned temperature", "stable-baselines3", shipped="")
def sb3_sac(variant: Variant) -> Report:
    from stable_baselines3 import SAC

    return actor_critic(variant, SAC)


@recipe(
    "TD3.train(): delayed updates of the actor, Polyak averages", "stable-baselines3", shipped=""
)
def sb3_td3(variant: Variant) -> Report:
    from stable_baselines3 import TD3

    return actor_critic(variant, TD3)


@recipe("TQC.train(): truncated quantile critics", "sb3-contrib", shipped="")
def sb3_tqc(variant: Variant) -> Report:
    from sb3_contrib import TQC

    return actor_critic(variant, TQC)


def actor_critic(variant: Variant, cls: Any) -> Report:
    model = of_baselines(variant, cls, False, buffer_size=64)
    remembered(variant, model, discrete=False)
    variant.starts(model.critic)
    for part in (model.actor, model.critic):
        part.optimizer = averaged(variant, part, part.optimizer)
    if getattr(model, "ent_coef_optimizer", None) is not None:
        holder = nn.Module()
        holder.log = nn.Parameter(model.log_ent_coef.detach().clone())
        model.log_ent_coef = holder.log
        temperature = torch.optim.Adam([holder.log], lr=3e-4)
        model.ent_coef_optimizer = averaged(variant, holder, temperature)
    losses = []
    with surrounded(variant):
        for _ in range(4):
            model.train(gradient_steps=2, batch_size=16)
            losses.append(model.logger.name_to_value["train/critic_loss"])
    return variant.report(model.critic, losses, model.critic.optimizer)


def transitions(variant: Variant, count: int = 64, discrete: bool = True) -> list[Any]:
    rng = seeded(variant)
    rows = []
    for _ in range(count):
        draws = torch.randn(13, generator=rng).clamp(-1, 1).numpy()
        rows.append(
            {
                "state": draws[:5],
                "next_state": draws[5:10],
                "reward": float(draws[12]),
                "action": int(abs(draws[10]) * 2.9) if discrete else draws[10:12],
                "is_state_terminal": False,
                "next_action": None,
                "adv": float(draws[11]),
                "v_teacher": float(draws[12]),
                "v_pred": float(draws[10]),
                "log_prob": -1.0,
            }
        )
    return rows


class Exact(nn.Module):
    """Cast outputs to fp32: the loops convert them to NumPy, which has no bf16."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.float()


@recipe("DoubleDQN.update", "pfrl", shipped="")
def pfrl_dqn(variant: Variant) -> Report:
    import pfrl

    plain = nn.Sequential(
        nn.Linear(5, 16),
        nn.Tanh(),
        nn.Linear(16, 3),
        Exact(),
        pfrl.q_functions.DiscreteActionValueHead(),
    )
    variant.starts(plain)
    model, optimizer = variant.shard(plain, torch.optim.Adam(plain.parameters(), lr=1e-2))
    agent = pfrl.agents.DoubleDQN(
        model,
        optimizer,
        pfrl.replay_buffers.ReplayBuffer(64),
        0.99,
        pfrl.explorers.Greedy(),
        replay_start_size=8,
        minibatch_size=8,
    )
    rows, losses = transitions(variant), []
    with surrounded(variant):
        for k in range(6):
            agent.update([[row] for row in rows[8 * k : 8 * k + 8]])
            losses.append(agent.loss_record[-1])
            if k % 2:
                agent.sync_target_network()
    return variant.report(model, losses)


@recipe("PPO._update, clip", "pfrl", shipped="clip")
def pfrl_ppo(variant: Variant) -> Report:
    import pfrl
    from pfrl.agents import PPO

    plain = nn.Sequential(
        nn.Linear(5, 16),
        nn.Tanh(),
        pfrl.nn.Branched(
            nn.Sequential(nn.Linear(16, 3), pfrl.policies.SoftmaxCategoricalHead()),
            nn.Linear(16, 1),
        ),
    )
    variant.starts(plain)
    model, optimizer = variant.shard(plain, torch.optim.Adam(plain.parameters(), lr=1e-2))
    agent = PPO(model, optimizer, minibatch_size=16, epochs=3, max_grad_norm=0.1)
    update = edited(
        PPO._update,
        (
            "torch.nn.utils.clip_grad_norm_(\n"
            "                self.model.parameters(), self.max_grad_norm\n            )",
            "clip(self.model, self.optimizer, self.max_grad_norm)",
        ),
        clip=variant.clip,
    )
    rows = transitions(variant)
    with surrounded(variant):
        update(agent, rows)
    return variant.report(model, list(agent.value_loss_record))


@recipe("SoftActorCritic.update: three optimizers", "pfrl", shipped="")
def pfrl_sac(variant: Variant) -> Report:
    import pfrl
    from torch import distributions

    class Squashed(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            mean, log = x.float().chunk(2, -1)
            normal = distributions.Normal(mean, log.clamp(-5, 2).exp())
            return distributions.Independent(normal, 1)

    policy = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 4), Squashed())
    critics = [
        nn.Sequential(
            pfrl.nn.ConcatObsAndAction(), nn.Linear(7, 16), nn.Tanh(), nn.Linear(16, 1), Exact()
        )
        for _ in range(2)
    ]
    variant.starts(critics[0])
    parts = [policy, *critics]
    pairs = [variant.shard(part, torch.optim.Adam(part.parameters(), lr=1e-2)) for part in parts]
    agent = pfrl.agents.SoftActorCritic(
        *(model for model, _ in pairs),
        *(optimizer for _, optimizer in pairs),
        pfrl.replay_buffers.ReplayBuffer(64),
        0.99,
        replay_start_size=8,
        minibatch_size=8,
    )
    rows = transitions(variant, discrete=False)
    with surrounded(variant):
        for k in range(6):
            agent.update([[row] for row in rows[8 * k : 8 * k + 8]])
    return variant.report(critics[0], list(agent.q_func1_loss_record), pairs[1][1])


@recipe("BC.train: batches of several minibatches", "imitation", shipped="optimizer")
def imitation_bc(variant: Variant) -> Report:
    from imitation.algorithms.bc import BC
    from imitation.data.types import Transitions
    from imitation.util.logger import HierarchicalLogger
    from stable_baselines3.common.logger import Logger

    rng = seeded(variant)
    world = environment(discrete=True)
    data = Transitions(
        obs=torch.rand(64, 5, generator=rng).numpy(),
        infos=np.array([{}] * 64),
        acts=torch.randint(0, 3, (64,), generator=rng).numpy(),
        dones=np.zeros(64, bool),
        next_obs=torch.rand(64, 5, generator=rng).numpy(),
    )
    torch.manual_seed(0)
    agent = BC(
        observation_space=world.observation_space,
        action_space=world.action_space,
        rng=np.random.default_rng(0),
        demonstrations=data,
        batch_size=32,
        minibatch_size=16,
        device="cpu",
        custom_logger=HierarchicalLogger(Logger(None, [])),
    )
    variant.starts(agent.policy)
    agent.optimizer = averaged(variant, agent.policy, agent.optimizer)
    seeded(variant)
    with surrounded(variant):
        agent.train(n_epochs=3, log_interval=10**6)
    return variant.report(agent.policy, [0.0], agent.optimizer)


def legged(variant: Variant, ported: bool) -> Report:
    """Train; under plain torch, the package's multi-GPU code all-reduces gradients."""
    from rsl_rl.algorithms import PPO
    from rsl_rl.models import MLPModel
    from rsl_rl.storage import RolloutStorage
    from tensordict import TensorDict

    rng = torch.Generator().manual_seed(variant.rank)

    def draws(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng)

    groups = {"actor": ["policy"], "critic": ["policy"]}
    first = TensorDict({"policy": torch.zeros(4, 5)}, batch_size=[4])
    gaussian = {"class_name": "rsl_rl.modules.GaussianDistribution"}
    actor = MLPModel(first, groups, "actor", 2, (16,), distribution_cfg=gaussian)
    critic = MLPModel(first, groups, "critic", 1, (16,))
    storage = RolloutStorage("rl", 4, 8, first, [2], "cpu")
    agent = PPO(
        actor,
        critic,
        storage,
        num_learning_epochs=2,
        num_mini_batches=2,
        schedule="fixed",
        max_grad_norm=0.5,
        multi_gpu_cfg=None
        if ported and not variant.stock
        else {
            "global_rank": variant.rank,
            "local_rank": variant.rank,
            "world_size": 2,
        },
    )
    both = nn.ModuleDict({"actor": actor, "critic": critic})
    variant.starts(both)
    if not variant.stock:
        _, agent.optimizer = variant.shard(both, agent.optimizer)
    update = (
        agent.update
        if not ported
        else lambda: edited(
            PPO.update,
            (
                "nn.utils.clip_grad_norm_(self.actor.parameters(), self.max_grad_norm)\n"
                "        nn.utils.clip_grad_norm_(self.critic.parameters(), self.max_grad_norm)\n",
                "clip(both, self.optimizer, self.max_grad_norm)\n",
            ),
            clip=variant.clip,
            both=both,
        )(agent)
    )
    seeded(variant)
    losses = []
    with surrounded(variant):
        for _ in range(3):
            for _ in range(8):
                step = RolloutStorage.Transition()
                step.observations = TensorDict({"policy": draws(4, 5)}, batch_size=[4])
                with torch.no_grad():
                    step.actions = actor(step.observations, stochastic_output=True).float()
                    step.actions = draws(4, 2)
                    step.values = critic(step.observations).float()
                    step.actions_log_prob = actor.get_output_log_prob(step.actions).float()
                    step.distribution_params = actor.output_distribution_params
                step.rewards, step.dones = draws(4), torch.zeros(4)
                storage.add_transition(step)
            agent.compute_returns(step.observations)
            losses.append(update()["value"])
    return variant.report(both, losses, agent.optimizer)


@recipe(
    "PPO.update, one clip for actor and critic", "rsl-rl-lib", shipped="clip, all-reduce removed"
)
def rsl_ppo(variant: Variant) -> Report:
    return legged(variant, ported=True)


@recipe(
    "PPO.update as it stands: its all-reduce of .grad left in",
    "rsl-rl-lib",
    shipped="",
    error=RuntimeError,
    match="gather_gradients",
)
def rsl_unported(variant: Variant) -> Report:
    return legged(variant, ported=False)


@recipe("A2C.train() as it stands: clip_grad_norm_ left in", "stable-baselines3", shipped="")
def sb3_unported(variant: Variant) -> Report:
    from stable_baselines3 import A2C

    return on_policy(variant, A2C, 8, ported=False)
