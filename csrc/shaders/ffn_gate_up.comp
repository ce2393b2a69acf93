// Gates, ups and coefficients of neurons in one dispatch, where no gate decides what is read: ffn_rows.glsl.
#version 460
#extension GL_GOOGLE_include_directive : require
#define GATE_AND_UP
#include "ffn_rows.glsl"
