"""PPO of rsl_rl's runner on an environment that is one small linear system."""

import os

import torch
from rsl_rl.env import VecEnv
from rsl_rl.runners import OnPolicyRunner
from tensordict import TensorDict

ENVS, STEPS = 8, 12


class Pull(VecEnv):
    """Moves points; the reward is how near they come to zero."""

    num_envs, num_actions, max_episode_length, device, cfg = ENVS, 2, 20, "cpu", {}

    def __init__(self, seed):
        self.draw = torch.Generator().manual_seed(seed)
        self.episode_length_buf = torch.zeros(ENVS, dtype=torch.long)
        self.at = torch.randn(ENVS, 4, generator=self.draw)

    def get_observations(self):
        return TensorDict({"policy": self.at.clone()}, batch_size=[ENVS])

    def step(self, actions):
        self.at[:, :2] += 0.1 * actions
        self.episode_length_buf += 1
        done = self.episode_length_buf >= self.max_episode_length
        self.at[done] = torch.randn(int(done.sum()), 4, generator=self.draw)
        self.episode_length_buf[done] = 0
        reward = -self.at.pow(2).sum(1)
        return self.get_observations(), reward, done.long(), {"time_outs": done}


def main():
    torch.manual_seed(0)
    model = {"class_name": "MLPModel", "hidden_dims": [16, 16], "activation": "elu"}
    spread = {"class_name": "GaussianDistribution", "init_std": 1.0}
    settings = {
        "num_steps_per_env": STEPS,
        "save_interval": 4,
        "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
        "actor": {**model, "distribution_cfg": spread},
        "critic": model,
        "algorithm": {"class_name": "PPO", "num_learning_epochs": 2, "rnd_cfg": None},
    }
    rank = int(os.environ["RANK"])
    runner = OnPolicyRunner(Pull(rank), settings, "logs", f"cuda:{rank}")
    runner.learn(12)


if __name__ == "__main__":
    main()
