from metalcore.ops.decode.decode_step import decode_step as decode_step
