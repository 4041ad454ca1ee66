from metalcore import _native
from metalcore._trace import trace
from metalcore.ops.train.rms_norm import RMSNormFunction, rms_norm
_native.load()
