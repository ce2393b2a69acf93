// Down by neuron for decode rows, from rows of blocks: ffn_down.glsl.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "ffn_down.glsl"
