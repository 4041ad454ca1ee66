#!/bin/sh
exec make wheels
