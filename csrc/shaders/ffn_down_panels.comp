// Down by neuron for decode rows, from panels: ffn_down.glsl.
#version 460
#extension GL_GOOGLE_include_directive : require
#define PANELS
#include "ffn_down.glsl"
