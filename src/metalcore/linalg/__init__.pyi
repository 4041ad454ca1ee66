from metalcore.ops.linalg.cholesky import cholesky as cholesky
from metalcore.ops.linalg.cholesky_solve import cholesky_solve as cholesky_solve
from metalcore.ops.linalg.cond import cond as cond
from metalcore.ops.linalg.det import det as det, slogdet as slogdet
from metalcore.ops.linalg.eigh import eigh as eigh, eigvalsh as eigvalsh
from metalcore.ops.linalg.householder import apply_householder as apply_householder, householder_vector as householder_vector
from metalcore.ops.linalg.inv import inv as inv
from metalcore.ops.linalg.lstsq import lstsq as lstsq
from metalcore.ops.linalg.lu import lu as lu
from metalcore.ops.linalg.matrix_rank import matrix_rank as matrix_rank
from metalcore.ops.linalg.orthogonalize import orthogonalize as orthogonalize, polar as polar
from metalcore.ops.linalg.pinv import pinv as pinv
from metalcore.ops.linalg.qr import qr as qr
from metalcore.ops.linalg.qr_solve import qr_solve as qr_solve
from metalcore.ops.linalg.solve import solve as solve
from metalcore.ops.linalg.svd import svd as svd, svdvals as svdvals
from metalcore.ops.linalg.trsm import trsm as trsm
from metalcore.ops.linalg.tsqr import tsqr as tsqr
