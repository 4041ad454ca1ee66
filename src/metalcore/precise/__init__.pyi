from metalcore.ops.precise.accumulator import Accumulator as Accumulator
from metalcore.ops.precise.cumsum import cumsum as cumsum
from metalcore.ops.precise.dot import dot as dot, norm as norm
from metalcore.ops.precise.double_float import DoubleFloat as DoubleFloat
from metalcore.ops.precise.matmul import matmul as matmul
from metalcore.ops.precise.sum import mean as mean, sum as sum
