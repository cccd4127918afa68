"""What a completion is worth: rewards of several kinds, by name, and their weighted sum."""

from async_rl.rewards.registry import Rewards, load_rewards
from async_rl.rewards.reward import Reward, RewardConfig, RewardError

__all__ = ["Reward", "RewardConfig", "RewardError", "Rewards", "load_rewards"]
