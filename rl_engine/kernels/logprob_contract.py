"""The logprob contract under its earlier import path."""

from rl_engine.contracts.logprob import AccDtype as AccDtype
from rl_engine.contracts.logprob import DeterminismScope as DeterminismScope
from rl_engine.contracts.logprob import DowncastAt as DowncastAt
from rl_engine.contracts.logprob import Engine as Engine
from rl_engine.contracts.logprob import ImplementationKind as ImplementationKind
from rl_engine.contracts.logprob import LogitsDtype as LogitsDtype
from rl_engine.contracts.logprob import LogprobBackendCapability as LogprobBackendCapability
from rl_engine.contracts.logprob import LogprobContract as LogprobContract
from rl_engine.contracts.logprob import LogprobOutputSpec as LogprobOutputSpec
from rl_engine.contracts.logprob import LogprobRole as LogprobRole
from rl_engine.contracts.logprob import MaskMode as MaskMode
from rl_engine.contracts.logprob import MaskSpec as MaskSpec
from rl_engine.contracts.logprob import MergeAxis as MergeAxis
from rl_engine.contracts.logprob import MergeKind as MergeKind
from rl_engine.contracts.logprob import MergeOrder as MergeOrder
from rl_engine.contracts.logprob import ReductionSpec as ReductionSpec
from rl_engine.contracts.logprob import ShardingSpec as ShardingSpec
from rl_engine.contracts.logprob import Transport as Transport
from rl_engine.errors import LogprobContractError as LogprobContractError
